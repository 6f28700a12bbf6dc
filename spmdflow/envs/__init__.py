"""Ready-made environments: other libraries' games, and a class whose methods are tools.

Each is `async def episode(row, *, base_url, model, api_key, ...)`, named in
actor.rollout.episode.environment like a custom one. They run in worker processes and import a
library only when it is used. This package does not know tokens or ranks.

  client    a client of an OpenAI-compatible endpoint that needs only the standard library
  mcp       tools of MCP servers
  openenv   environments of OpenEnv, behind a URL
  reasoning tasks of reasoning-gym, and their reward
  textarena games of TextArena
  verifiers environments of verifiers, and their tasks as rows
  tools     a class with `reset(**row)`, public methods as tools and `get_reward()`
"""
