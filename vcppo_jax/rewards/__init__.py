"""Rule-based rewards: answer extraction, exact equality, a killable verifier pool, scores with reasons."""
