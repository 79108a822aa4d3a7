"""What moves the weights: parameter groups, optimizers and learning rate schedules."""
