"""Time, samples, memory and cost of a run before it is made: a model of few numbers, fitted on published results."""
