"""How plastic attention is: whether queries still decide which key wins, and what takes that from them."""
