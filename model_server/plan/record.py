"""A plan as one JSON object, units in the names; for charts and scripts.

In: a plan. Out: plain values.
"""

from model_server.plan.plan import Plan


def plan_record(plan: Plan) -> dict[str, object]:
    """Return the object."""
    pool, gpu = plan.pool, plan.gpu
    deployment, budget = pool.deployment, pool.budget
    return {
        "model": plan.name,
        "gpu": gpu.name,
        "tensor_parallel": deployment.tensor_parallel,
        "context_tokens": plan.context_tokens,
        "parameters": deployment.parameters,
        "weight_bytes": deployment.weight_bytes,
        "kv_cache_dtype": "fp8" if deployment.fp8_kv else "auto",
        "gpu_memory_bytes": budget.memory_bytes,
        "gpu_memory_utilization": budget.utilization,
        "gpu_reserve_bytes": budget.reserve_bytes,
        "gpu_weights_bytes": deployment.gpu_weights_bytes,
        "gpu_pool_bytes": pool.gpu_bytes,
        "gpu_block_bytes": deployment.gpu_block_bytes,
        "block_tokens": deployment.block_tokens,
        "num_gpu_blocks": pool.blocks,
        "kv_bytes_per_token": deployment.token_bytes,
        "kv_groups": [
            {"kind": group.kind, "window_tokens": group.window_tokens, "layers": len(group.layers)}
            for group in deployment.groups
        ],
        "max_sequences": plan.sequences,
        "max_context_tokens": plan.longest_context,
        "prefill_s": plan.prefill_s,
        "decode": [
            {
                "batch": step.batch,
                "step_s": step.step_s,
                "weights_s": step.weights_s,
                "kv_s": step.kv_s,
                "compute_s": step.compute_s,
                "tokens_per_s": step.tokens_per_s,
                "bound": step.bound,
            }
            for step in plan.steps
        ],
        "tensor_parallel_options": [
            {
                "tensor_parallel": option.tensor_parallel,
                "gpu_weights_bytes": option.gpu_weights_bytes,
                "gpu_pool_bytes": option.gpu_pool_bytes,
                "headroom": option.headroom,
                "max_sequences": option.sequences,
            }
            for option in plan.options
        ],
        "advised_tensor_parallel": plan.advised.tensor_parallel if plan.advised else None,
        "preemption": {
            "recompute_s": plan.preemption.recompute_s,
            "swap_s": plan.preemption.swap_s,
            "even_link_bytes_per_s": plan.preemption.even_link_bytes_per_s,
            "mode": plan.preemption.mode,
        },
    }
