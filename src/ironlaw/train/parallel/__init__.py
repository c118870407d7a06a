"""One layout, many ranks: everything below is PyTorch's own distributed engine.

ranks.py     process group, device mesh, what this rank is
apply.py     the layout put on the model, in a fixed order
tensor.py, context.py, pipeline.py, place.py   what each of the parallelisms changes
step.py      forward, backward, loss and gradient norm over all ranks
traffic.py   collectives counted while a step runs
"""
