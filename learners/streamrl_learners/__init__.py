"""The learner of streamrl: streams rows into steps, corrects them for being off-policy, publishes weights."""
