"""What runs on each node: one agent per node, the rank processes it supervises, and their words to the controller."""
