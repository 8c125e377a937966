"""The step: what a rank owns, the local optimizers that step it, and what has to be agreed around a step."""
