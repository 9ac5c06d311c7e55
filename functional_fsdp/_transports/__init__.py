"""Ways to move one bucket: collectives, NCCL's symmetric memory, copies over NVLink."""
