"""Ways to sample faster or in less memory, one to a file.

Each says what it needs of a run and what it takes away. What excludes what follows from that.
"""
