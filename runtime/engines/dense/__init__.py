"""Dense weights of the async mode: rank 0, which has them, and the ranks that pull and push."""
