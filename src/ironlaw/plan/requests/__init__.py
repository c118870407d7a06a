"""What `ironlaw plan` says beside the numbers: the layout chosen, why others lose, what to change."""
