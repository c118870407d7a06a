"""One layout, many ranks: everything below is PyTorch's own distributed engine.

job.py           a job of ranks as torchrun starts it
ranks.py         the mesh of many processes: process groups, what this rank is
apply.py         the layout put on the model, in a fixed order
tensor.py, partition.py, pipeline.py, experts.py   what each of the parallelisms changes
step.py          what a layout changes in a step: reductions, stages, what all ranks agree on
observer.py      who sends what, who waits, who is slow, who hangs; the ledger of all ranks
"""
