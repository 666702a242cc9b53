"""A MoE layer over epcomm in array code, for CuPy on GPUs and NumPy on CPU ranks alike."""
