"""GPU-sharded synchronous training: tables over the GPUs' memories, as TorchRec and HugeCTR."""
