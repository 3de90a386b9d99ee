"""The store in C++ (`kernels/`) and its thin Python side."""
