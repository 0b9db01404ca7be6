def all_gather(x, group):
    raise NotImplementedError("ring attention is not tested here")
