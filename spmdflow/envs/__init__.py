"""Bridges: environments that play other libraries' games, or a class with tools, as an agent would.

Each is `async def episode(row, *, base_url, model, api_key, ...)`, named in
actor.rollout.episode.environment like one of your own. They run in worker processes and import a
library only when it is used. Knows no tokens and no ranks.

  client    asks an OpenAI-compatible endpoint, with the standard library alone
  textarena games of TextArena
  tools     a class with `reset(**row)`, public methods as tools and `get_reward()`
"""
