"""Values of arguments of a ring. Like `ringattn.kernels.choices`, this module does not import torch."""

KINDS = ("contiguous", "zigzag", "striped")  # of layouts
SCHEDULES = ("auto", "state", "kv")

# "relay": ranks pass blocks on to their neighbours. "direct": every message goes to the rank that needs it. "auto": direct
# inside one host.
ROUTES = ("auto", "relay", "direct")
