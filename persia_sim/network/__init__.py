"""How messages share network interfaces: FIFO, fluid (max-min fair), unshared."""
