"""What a change of the inside must leave as it is: each file here holds one answer of the program, and a test compares it.

`python -m tests.frozen --write` writes the files anew, after a change that is meant to be seen. Values that differ from run
to run or between machines (ids, times, speeds, probabilities) are replaced by placeholders; names, order and shape stay.
"""
