"""Steps: what a rank owns, its local optimizers, and the agreements around a step."""
