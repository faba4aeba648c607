"""How the work lies on the ranks: folded mesh, sharding plan, FSDP2, tensor and expert parallelism, dispatchers."""
