"""Compute attention and its gradients under interval masks on one device, without communication.

Every backend provides two functions, `forward` and `backward`, which `ringattn.kernels.reference` specifies.
`ringattn.kernels.backends` selects a backend by device, dtype and shape, and `ringattn.kernels.dispatch` calls it.
"""
