"""The plan of one process: on the measured machine, or of a traced module on an accelerator."""
