"""The fakes of the tests, one file a part, behind the Protocols of the real parts.

clock      timers that tests move, and turns of the event loop
config     the smallest config of a run
prompts    prompts p0, p1, …, some with images and some that cannot be sampled
queue      the real queue, which can die
students   the real worker without an engine; replicas that die, hang and take weights
teachers   replicas that score, fail, hang and share their GPUs
trainer    the real batcher without a learner
sync       both ends of a weight sync
processes  actors' processes that die, hang and are built again
environments  environments that hang, die and raise, and processes that only seem to have some
log        what a run logs
run        a whole pipeline of these; ``faults`` makes its parts fail
"""
