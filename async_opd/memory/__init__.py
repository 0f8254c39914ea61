"""How many bytes a run takes of each GPU and host, before anything starts. No torch.

``step`` is one rank in a training step, with what autograd keeps of its layers, ``reload`` an
engine that takes new weights, ``pools`` all pools of a config.
"""
