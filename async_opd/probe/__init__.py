"""What a student's and a teacher's answers and scores predict of a distillation.

    responses and scores of both ──positions──► figures ──verdict──► words, a suggestion, a score

All of it computes with arrays alone. How far the student is from itself is said as in ``doctor``.
"""
