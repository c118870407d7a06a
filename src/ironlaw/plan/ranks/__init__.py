"""The plan of a run on several processes of measured machines: seconds, memory and messages of every rank."""
