"""Several ranks of one engine, a process each: rank 0 decides, the others do the same.

Read in this order: ranks.py says what a start asks of the others, followers.py what a step tells
them; messages.py is how that is written, ring.py how it gets there, over the memory of shared.py.
lead.py is rank 0's side, follow.py and worker.py are the other one; processes.py starts, watches
and ends them. group.py is what they exchange data by; equal_bits.py says on how many GPUs a model
has the bits of one.
exchange.py is what the models of ranks do with it, over the transfers of transfers.py.
"""
