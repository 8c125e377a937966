"""PyTorch's private names and streams, and host memory."""
