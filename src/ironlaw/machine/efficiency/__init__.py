"""Times of single operations on catalogued accelerators, from a few physical constants per generation.

    from ironlaw.machine.efficiency.matmul import matmul_seconds
    hardware = Hardware("h100", {"bf16": 989e12}, 3.35e12, 132, 700.0, load_efficiency("hopper"))
    matmul_seconds(8192, 4096, 4096, dtype="bf16", hardware=hardware)

All functions take plain floats or numpy arrays and broadcast. Nothing here imports torch.
"""
