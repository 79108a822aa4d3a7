"""What people reported of checkpoints and resumes elsewhere, and the test that shows it cannot happen here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESUME, CASES = "tests/checkpoint/test_resume.py", "tests/train/test_resume_cases.py"

REPORTED: tuple[tuple[str, str, str], ...] = (
    ("the printed rate moves after a resume, the optimizer's does not", CASES,
     "test_after_a_resume_the_optimizer_steps_with_the_rates_of_an_uninterrupted_run"),
    ("warm-up begins again at a resume", CASES,
     "test_after_a_resume_the_optimizer_steps_with_the_rates_of_an_uninterrupted_run"),
    ("more steps at a resume: the rate jumps without a word", CASES,
     "test_more_steps_at_a_resume_are_told_and_the_rest_follows_the_new_schedule"),
    ("random numbers are not saved, or all ranks get those of rank 0", CASES,
     "test_dropout_differs_in_every_micro_batch_and_follows_the_step_not_the_start"),
    ("the loss scale of fp16 starts anew", CASES, "test_fp16_with_its_loss_scale_is_refused_by_name"),
    ("another number of ranks, or another stage, dies deep inside or has fresh moments", CASES,
     "test_a_run_goes_on_with_2_4_1_3_and_2_ranks_and_stages_1_3_2_0_and_1"),
    ("a second start into an old run's place goes on or overwrites it", "tests/train/test_runs.py",
     "test_an_existing_name_and_a_second_trainer_are_refused_and_leave_the_run_alone"),
    ("a resume from what is not there starts from random weights", "tests/rundir/test_directory.py",
     "test_must_refuses_a_run_that_does_not_exist_and_makes_nothing"),
    ("a named checkpoint that is not there starts from random weights", RESUME, "test_what_does_not_fit_is_named"),
    ("killed while it saves: every start takes the half written one", "tests/checkpoint/test_save.py",
     "test_a_kill_in_the_middle_of_a_save_costs_only_that_save"),
    ("one rank's file is empty or gone, the checkpoint counts as whole", RESUME,
     "test_damage_is_found_and_the_one_before_is_used"),
    ("a full disk leaves a part, and the run goes on as if saved", "tests/checkpoint/test_save.py",
     "test_a_full_disk_leaves_no_part_and_the_last_good_checkpoint"),
    ("a full disk again and again is never told", "tests/train/test_saving.py",
     "test_too_many_failures_in_a_row_end_the_run_on_every_rank_with_the_reason"),
    ("the old one is removed before the new one is saved", "tests/checkpoint/test_retention.py",
     "test_a_failed_save_leaves_the_only_good_checkpoint"),
    ("keeping none removes all", "tests/checkpoint/test_format.py",
     "test_pruning_asks_the_guard_before_each_deletion_and_refuses_to_delete_all"),
    ("keeping the best and the last removes the wrong one", "tests/checkpoint/test_retention.py",
     "test_best_and_last_are_both_kept"),
    ("one rank sees no checkpoint and starts anew, the others wait", RESUME, "test_what_does_not_fit_is_named"),
    ("a save that only rank 0 makes hangs", RESUME, "test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit"),
    ("missing names keep random weights", RESUME, "test_what_does_not_fit_is_named"),
    ("a flipped bit loads without a word", "tests/checkpoint/test_flips.py",
     "test_every_flipped_bit_is_found_before_a_weight_is_used"),
    ("a tied matrix is untied by save and load", "tests/checkpoint/test_states.py",
     "test_a_tied_matrix_is_one_tensor_before_and_after_and_in_the_files"),
    ("a tied matrix is exported twice, or not", "tests/launch/test_export.py",
     "test_transformers_loads_what_was_trained"),
    ("bf16 at stage 0 loses its optimizer state", RESUME,
     "test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit"),
    ("an exported model gives other logits", "tests/model/test_hf_families.py",
     "test_an_exported_model_gives_the_same_logits_and_gradients_in_transformers"),
    ("padded rows of a vocabulary come out of a generation", "tests/generate/test_decode.py",
     "test_the_end_id_ends_the_text_and_banned_or_unknown_ids_never_come_out"),
    ("the weights of the last steps are never saved", "tests/train/test_saving.py",
     "test_every_run_ends_with_a_checkpoint_of_its_last_step"),
    ("an export takes several times the model", "tests/checkpoint/test_export_memory.py",
     "test_an_export_needs_memory_for_one_weight_whatever_the_size_of_the_model"),
    ("a rank without targets makes the loss of all no number", "tests/engine/test_training.py",
     "test_a_rank_without_targets_adds_nothing_and_spoils_nothing"),
    ("a step without targets makes the loss no number", "tests/engine/test_training.py",
     "test_a_step_without_targets_is_finite_and_changes_nothing"),
    ("a save takes several times the state", "tests/checkpoint/test_export_memory.py",
     "test_a_save_needs_memory_for_one_copy_of_the_state_and_a_restore_for_pieces"),
    ("an infinite norm turns the step around", "tests/engine/test_training.py",
     "test_a_non_finite_gradient_changes_nothing_on_any_rank_at_any_stage"),
    ("a query that sees no key is no number, and spreads", "tests/model/test_attention.py",
     "test_a_query_that_sees_no_key_gives_zero_and_finite_gradients"),
)  # fmt: skip


@pytest.mark.parametrize(("file", "name"), sorted({case[1:] for case in REPORTED}))
def test_the_test_of_a_reported_case_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
