"""What finished runs reached: numbers read from MLPerf logs, anybody's, and the page that shows them."""
