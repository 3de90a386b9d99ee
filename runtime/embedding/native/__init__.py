"""The store in C++ (`kernels/`) and its thin Python side, file by file beside `reference`."""
