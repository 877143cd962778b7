"""gpubox: releases of an inference server on a GPU box, their proofs, and the switch between them."""
