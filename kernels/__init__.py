"""This package contains attention kernels for one device: forward and backward under interval masks, without communication.

Every backend provides two functions, `forward` and `backward`, which `ringattn.kernels.reference` specifies.
`ringattn.kernels.backends` selects a backend by device, dtype and shape, and `ringattn.kernels.dispatch` calls it.
"""
