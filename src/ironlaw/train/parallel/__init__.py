"""Training on many ranks with a layout, based on PyTorch's distributed engine.

job.py           a job of ranks started by torchrun
ranks.py         the mesh of many processes: process groups and this rank's coordinates
apply.py         applies the layout to the model, in a fixed order
tensor.py, partition.py, pipeline.py, experts.py   the individual kinds of parallelism
step.py          what a layout changes in a step: reductions, stages, agreement among ranks
observer.py      communication, waiting, slow and hanging ranks; the ledger of all ranks
"""
