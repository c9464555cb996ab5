"""What `import mlbert` offers for training loops of your own: data, model and optimizer."""
