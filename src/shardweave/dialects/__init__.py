"""How frameworks lay out state: each framework's rules, stated once.

``hf``, ``megatron``, ``vllm`` and ``fsdp`` give the layout of a whole model on a mesh, ``fsdp`` that of live
DTensors too; ``deepspeed`` gives that of one weight at a time, as AutoTP cuts it. Each module is imported by
its own name.
"""
