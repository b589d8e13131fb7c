"""What a model needs and what a machine can give."""
