"""What travels between ranks and servers, and how: messages, channels, memory, who listens."""
