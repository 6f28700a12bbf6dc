"""What the author of a role writes against: `Worker`, its metrics, and the marks of its methods.

Everything here is free of sockets and of moving rows. The controller reads the marks to plan a call
(`controller.planning`), and the ranks run the methods (`runtime.operation`).

| file | what |
|---|---|
| worker | `Worker`, and where it runs (`WorkerContext`) |
| command | `Command`: one rank's part of the call that is running |
| metric | `Mean`, `Sum`, `Max`, `Min`: how the values of many ranks become one |
| register | the marks: `@register` for methods, `@map_function` for functions of `batch.map` |
"""
