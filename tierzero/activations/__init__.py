"""What is kept of a forward for its backward."""
