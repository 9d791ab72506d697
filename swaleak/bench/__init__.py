"""What each strategy costs: grouped ``free_swa``, all contestants interleaved, medians a group.

What is timed is the bookkeeping of one free group: begin, ``calls`` frees, end. The physical
release, the same for everybody, is left out unless asked for: the pools' own frees do nothing.
Every sample starts from the same state, which is put back outside the timed part. Nothing is
printed here: ``rounds.run`` yields rounds, ``figures.results`` turns them into figures.
"""
