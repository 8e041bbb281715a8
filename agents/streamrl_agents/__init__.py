"""Environments, conversations, tools, rewards: how an agent's episode becomes one exact row of tokens.

agent.py           load_agent: a class whose public methods are tools, or a function that drives a chat
tools.py           methods -> JSON schemas, checked arguments, results as text
parsing.py         the model's text -> tool calls, piece by piece
formats.py         how families of models write their calls: hermes, llama3_json, pythonic, mistral, deepseek, json
template.py        messages -> text -> ids, as the model's own chat template says
conversation.py    token exactness: what was sampled is never encoded again
chat.py            one turn after another, within limits
episode.py         one task -> one Trajectory, whatever happens
demonstrations.py  scripted episodes for warm starts
rewards.py         the reward stage
vocabulary.py      tokenizer and model files of tiny self-made models
"""

from .parsing import ToolCall

__all__ = ["ToolCall"]
