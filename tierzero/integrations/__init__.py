"""Other people's training loops over sharded models, one module for each library: import the one that you use.

Nothing else in TierZero imports these, and none of the libraries is needed to use the rest.
"""
