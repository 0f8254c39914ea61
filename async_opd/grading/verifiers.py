"""Which of reasoning_gym's verifiers only read a response, and which may run it as code."""

from __future__ import annotations

SAFE_TASKS = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf
    binary_alternation bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum
    circuit_logic codeio coin_flip color_cube_rotation complex_arithmetic count_bits
    count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice
    emoji_mystery family_relationships figlet_font fraction_simplification futoshiki
    game_of_life game_of_life_halting gcd graph_color group_anagrams gsm_symbolic
    isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze
    mini_sudoku modulo_grid needle_haystack number_filtering number_format number_sequence
    number_sorting palindrome_generation palindrome_partitioning path_star polynomial_equations
    pool_matrix power_function prime_factorization products propositional_logic quantum_lock
    ransom_note rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour
    self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban
    spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism
    time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting
    zebra_puzzles
    """.split()  # noqa: SIM905  a list has one name a line
)
"""Tasks of reasoning_gym 0.1.25 whose verifiers parse, compare and count. All other verifiers count
as unsafe: they ``eval`` the response, or pass it to sympy, which does (``composite``: whatever its
tasks do), or belong to a newer version."""

REMEDY = (
    "take another task, or files with a grader of your own; with grading.allow_eval: true these "
    "verifiers run, and a response can run code as you"
)


def evaluates(task: str) -> bool:
    """Whether the verifier of the task may run a response as code."""
    return task not in SAFE_TASKS
