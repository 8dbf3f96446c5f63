"""Attention kernels for one device: forward and backward over interval masks.

Every family of kernels offers the same two functions, `forward` and `backward`, with the contract written down in
`ringattn.kernels.reference`; `ringattn.kernels.dispatch` picks one by device, dtype and shape. Nothing here knows a process group.
"""

OWNER = "ringattn"  # a package of the same name exists elsewhere: ringattn checks that it got this one
