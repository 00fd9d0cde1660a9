"""List the GPT-NeoX keys that are accepted but have no effect, each with the reason.

A run computes the same numbers with and without these keys. The keys concern files on disk, console
output, memory or speed, or they belong to a feature whose main key is refused. The user gets a note
about each such key, unless its value is false or empty.

A key inside a mapping is written with a dot, as MAPPING.KEY. If the value of a listed key is a
mapping, no key inside that mapping has an effect.
"""

from megatron.config.fields import Check, flag, text, whole_number

REPORTS = "a report of DeepSpeed or GPT-NeoX that is not written"

_KEYS: dict[str, str] = {
    "torchrun, deepspeed or srun start the processes, by their command line": """
        hostfile include exclude num_nodes num_gpus master_port master_addr launcher
        force_multi detect_nvlink_pairs no_ssh_check slurm_comment comment account
        deepspeed_slurm deepspeed_mpi global_num_gpus user_script
    """,
    "a choice of kernel for the same function; attention_backend chooses here": """
        scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion
        bias_dropout_fusion rope_fusion
        fused_kernels_build_path use_flashattn_swiglu
    """,
    "saves memory in DeepSpeed's own checkpointing, which is not used": """
        partition_activations synchronize_each_layer contiguous_checkpointing
        checkpoint_in_cpu deepspeed_activation_checkpointing profile_backward
        activation_checkpointing
    """,
    REPORTS: """
        dump_state comms_logger tensorboard wandb csv_monitor log_param_norm
        log_grad_pct_zeros log_optimizer_states log_gradient_noise_scale
        gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload git_hash config_files
    """,
    "generate.py has options instead: --prompts, --interactive, --num-samples, --max-new-tokens, "
    "--temperature, --top-p and --top-k; the text goes to standard output": """
        text_gen_type temperature top_p top_k maximum_tokens sample_input_file
        sample_output_file num_samples
    """,
    "text generation does not read it": """
        precompute_model_name return_logits prompt_end recompute
    """,
    "only for mamba layers, which are refused": """
        mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion
        mamba_selective_fp32_params mamba_use_bias_in_conv mamba_use_bias_in_linears
    """,
    "only for Transformer Engine layers, which are refused": """
        te_fp8_format te_fp8_wgrad te_fp8_amax_history_len te_fp8_amax_compute_algo
        te_fp8_margin
    """,
    "only for a train_impl that is refused": """
        dpo_fp32 dpo_reference_free dpo_beta kto_fp32 kto_desirable_weight kto_beta
        kto_undesirable_weight fp32_reinforce kl_impl kl_div_beta reinforce_leave_one_out
        online_dataserver_ips online_dataserver_ports
    """,
    "metrics are not sent to Comet, only to wandb (use_wandb)": """
        use_comet comet_workspace comet_project comet_experiment_name comet_tags
        comet_others comet_experiment
    """,
    "only for attention types that are refused": """
        sparsity_config sparse_attention gmlp_attn_dim dim_att head_size ffn_dim
    """,
    "bf16 needs no loss scaling": """
        bf16.bf16 bf16.loss_scale bf16.loss_scale_window bf16.hysteresis bf16.min_loss_scale
        bf16.initial_scale_power
    """,
    "stages are split between blocks, as evenly as possible": "pipe_partition_method",
    "layernorm has a bias, other norms have none; gpt-neox never reads it": "use_bias_in_norms",
    "it follows from the tokenizer and make_vocab_size_divisible_by": "padded_vocab_size",
    "the grad norm is always logged": "log_grad_norm",
    "wandb names the run": "wandb_run_name",
    "only rank 0 writes to wandb": "wandb_init_all_ranks",
    "initial values depend only on the seed and the parameter's name": "use_cpu_initialization",
    "no forward pass is stored beside a checkpoint": "checkpoint_validation_with_forward_pass",
    "bits per byte are reported instead": "char_level_ppl",
    "only num_unique_layers reads it": "param_sharing_style",
    "num_kv_heads sets the number of key and value heads": "attention_type",
    "DAPE's own networks read it; the width of fire here is pos_emb_options: {width: 32}": """
        mlp_width noise_seq_length capev2_kernel
    """,
    "only mixtures of experts read it": """
        moe_expert_interval moe_top_k moe_router_type moe_lbl_in_fp32 moe_jitter_eps
    """,
    "only muP reads it": """
        mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult
        mup_rp_embedding_mult mup_width_scale base_shapes_file
    """,
    "rotary frequencies are never stored": "rotary_save_freqs_buffer",
    "every rank reads or builds the index for itself": "use_shared_fs",
    "metrics are written to the run folder, `save`": "log_dir",
    "DeepSpeed's timers are not printed": "wall_clock_breakdown",
    "log_interval sets how often a line is printed": "steps_per_print",
    "the softmax always accumulates in fp32": "attention_softmax_in_fp32",
    "the operating system reads shards ahead": "mmap_warmup",
    "every block is recomputed by itself": "checkpoint_num_layers",
    "this run's schedule continues, unless use_checkpoint_lr_scheduler": "override_lr_scheduler",
    "batches are sliced from memory-mapped shards by the training process itself": "num_workers",
    "no program of this code reads it": """
        deepspeed deepscale deepscale_config lazy_mpu_init short_seq_prob adlr_autoresume
        adlr_autoresume_interval weight_server_port s3_chunk_size
        curriculum_seqlen local_rank rank zero_allow_untested_optimizer allow_chopped
    """,
    "the same as `enabled`": "fp16.fp16",
    "inputs are token ids, which are never cast": "fp16.auto_cast",
    "the optimizer is never built by DeepSpeed": """
        optimizer.params.torch_adam optimizer.params.freeze_step optimizer.params.cuda_aware
    """,
}
NO_EFFECT: dict[str, str] = {key: reason for reason, keys in _KEYS.items() for key in keys.split()}

CHECKS: dict[str, Check] = {
    "log_dir": text,
    "padded_vocab_size": whole_number(1),
    "use_bias_in_norms": flag,
    "wall_clock_breakdown": flag,
    "steps_per_print": whole_number(1),
    "attention_softmax_in_fp32": flag,
    "mmap_warmup": flag,
    "checkpoint_num_layers": whole_number(1),
    "override_lr_scheduler": flag,
    "num_workers": whole_number(0),
}
"""Maps some keys without effect to a check of their values. A value that fails is an error."""
