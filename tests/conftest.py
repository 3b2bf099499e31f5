import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch

# What `make test-fast` leaves out, so that it takes less than a minute on two cores. The list was made from the CPU
# time of every test with its child processes. A function is listed if its cases together took half a second or more,
# unless each of its many cases tests something else in a few milliseconds. The cases whose names hold one of the words
# given here stay, so that the fast run still calls every module and every kernel.
SLOW: dict[str, tuple[str, ...]] = {
    "test_allocator.py::test_another_allocator_loaded_first_is_not_tuned": (),
    "test_allocator.py::test_freed_memory_is_kept_and_page_faults_go": (),
    "test_blpa.py::test_no_full_size_temporary": (),
    "test_blpa.py::test_random_rounding_leaves_no_bias_and_the_published_quantizer_does": (),
    "test_blpa.py::test_what_is_no_unit_has_the_same_bits": (),
    "test_bytes.py::test_bert_base_with_dropout_keeps_over_six_times_less": (),
    "test_bytes.py::test_measured_peak_falls_below_plain_and_checkpointing": (),
    "test_bytes.py::test_resnet50_at_224_pixels_keeps_over_eleven_times_less": (),
    "test_check.py::test_a_broken_codec_is_unsafe_and_its_site_comes_first": (),
    "test_check.py::test_a_plan_repeats_what_the_method_did": ("division",),
    "test_check.py::test_a_result_repeats": (),
    "test_check.py::test_a_scale_that_is_wrong_everywhere_is_unsafe_at_two_bits_too": (),
    "test_check.py::test_adaptive_methods_learn_before_they_are_judged": (),
    "test_check.py::test_check_command_writes_json_alone_to_standard_output": (),
    "test_check.py::test_pure_noise_is_rarely_called_bias": (),
    "test_check.py::test_sgd_noise_is_the_spread_over_batches": ("256-mean",),
    "test_check.py::test_two_bits_on_a_small_network_are_no_danger": ("division",),
    "test_check.py::test_weights_buffers_grads_and_random_states_are_untouched": ("division",),
    "test_cli.py::test_a_child_ends_by_itself_when_its_parent_is_killed": (),
    "test_cli.py::test_an_exception_in_the_parent_ends_the_child_and_leaves_nothing": (),
    "test_cli.py::test_an_interrupt_while_waiting_ends_the_child": (),
    "test_cli.py::test_child_death_carries_its_code_and_last_words": (),
    "test_cli.py::test_child_failure_carries_its_traceback": (),
    "test_cli.py::test_children_pause_until_they_are_resumed": (),
    "test_cli.py::test_demo_runs_end_to_end": (),
    "test_cli.py::test_doctor_names_versions_methods_and_kernels": (),
    "test_cli.py::test_exact_rss_sees_small_blocks_come_back": (),
    "test_cli.py::test_peak_above_measures_an_allocation_and_forgets_earlier_peaks": (),
    "test_derive.py::test_convolution_after_norm_and_relu_stays_unbiased": (),
    "test_guard.py::test_a_biased_codec_is_found_raised_logged_and_kept": (),
    "test_guard.py::test_a_guard_that_finds_nothing_changes_nothing": ("division",),
    "test_guard.py::test_checkpointing_the_attached_model": (),
    "test_guard.py::test_precision_goes_up_until_the_error_is_allowed": (),
    "test_guard.py::test_ranks_probe_for_themselves": (),
    "test_guard.py::test_resuming_between_any_two_steps_repeats_the_run": (),
    "test_kernels.py::test_a_threading_layer_that_aborts_when_shared": (),
    "test_kernels.py::test_blocks": ("geometry0-8-dtype0", "geometry5-8-dtype0"),
    "test_kernels.py::test_fork": (),
    "test_kernels.py::test_groups": ("dtype0-2-",),
    "test_kernels.py::test_import_leaves_numba_alone": (),
    "test_kernels.py::test_kernel_that_does_not_compile": (),
    "test_kernels.py::test_large_blocks": (),
    "test_kernels.py::test_levels": ("dtype0-2-",),
    "test_kernels.py::test_levels_in_threads": ("2 threads-2",),
    "test_kernels.py::test_no_place_for_a_cache": (),
    "test_kernels.py::test_notice_and_cache": (),
    "test_kernels.py::test_pack_band": ("dtype0",),
    "test_kernels.py::test_reference_on_request": (),
    "test_kernels.py::test_samples": ("dtype0-False",),
    "test_kernels.py::test_samples_in_threads": (),
    "test_kernels.py::test_threads_are_those_of_torch": (),
    "test_kernels.py::test_widths_of_several_planes": ("dtype0-3-",),
    "test_kernels.py::test_widths_of_several_planes_in_threads": ("2 threads-3",),
    "test_kernels.py::test_without_numba": (),
    "test_memory.py::test_fake_bytes_are_real_bytes": ("resnet-division", "tokens-lowrank"),
    "test_memory.py::test_fake_bytes_are_real_bytes_in_other_networks": (),
    "test_memory.py::test_items_add_up_to_the_report": (),
    "test_memory.py::test_plain_bytes_against_a_count_by_hand": ("ResNet-50-1",),
    "test_memory.py::test_published_figures_are_met": (),
    "test_memory.py::test_stored_results_are_current": (),
    "test_mixing.py::test_a_resumed_run_rounds_the_same": ("1-auto",),
    "test_mixing.py::test_batches_of_changing_size_accumulation_and_evaluation": ("actnn",),
    "test_mixing.py::test_probes_may_come_between_a_forward_and_its_backward": (),
    "test_mixing.py::test_probes_repeat_every_so_many_steps": (),
    "test_mixing.py::test_realised_bits_are_within_the_average": ("2.5",),
    "test_mixing.py::test_sensitivity_times_error_is_what_rounding_does_to_the_weight_gradient": ("linear",),
    "test_mixing.py::test_the_plan_beats_equal_bits_for_all": (),
    "test_mixing.py::test_the_plan_keeps_its_promise_of_bytes": ("2.3",),
    "test_plan.py::test_a_plan_of_every_method_repeats_it_bit_for_bit": ("division-residual", "blpa-residual"),
    "test_plan.py::test_twenty_sessions_equal_twenty_attached_steps_bit_for_bit": (),
    "test_projection.py::test_random_has_the_variance_of_the_formula": (),
    "test_projection.py::test_random_is_unbiased": ("0-torch.float32",),
    "test_projection.py::test_signs_are_fair_and_independent": (),
    "test_replay.py::test_the_expected_square_is_the_square": ("dense",),
    "test_rules.py::test_value_rows_compress_within_the_step": ("Convolution.input", "Addmm.mat1", "NativeBatchNorm"),
    "test_session.py::test_compiled_code_stays_exact_and_is_listed": (),
    "test_session.py::test_ddp_on_two_ranks_is_bit_equal_with_raw": (),
    "test_training.py::test_a_run_repeats_and_depends_on_its_seed": ("actnn",),
    "test_training.py::test_a_stopped_run_goes_on_as_if_it_had_not_been": ("auto",),
    "test_tuning.py::test_bits_of_equal_weight_are_optimal": (),
    "test_tuning.py::test_bits_of_unequal_weight_are_within_one_step_of_the_optimum": (),
    "test_tuning.py::test_chosen_options_are_within_one_gain_of_the_optimum_and_the_budget": (),
    "test_tuning.py::test_fitted_levels_are_no_worse_than_even_ones": ("uniform-3", "normal-3"),
    "test_tuning.py::test_fitted_levels_are_the_best_of_all_on_the_grid": ("0-2",),
    "test_zoo.py::test_exact_codecs_leave_gradients_bit_identical": (
        "densenet-lossless",
        "bert-raw",
        "custom-function",
    ),
    "test_zoo.py::test_gradient_error_falls_with_bits_and_stays_below_the_bound": ("unet", "custom-function"),
    "test_zoo.py::test_sites_are_the_same_in_each_step": ("mobilenet", "bert"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        function, _, case = item.name.partition("[")
        words = SLOW.get(f"{item.path.name}::{function}")
        if words is not None and not any(word in case for word in words):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _fixed_seed():
    """A test's random numbers do not depend on the tests before it."""
    torch.manual_seed(0)
