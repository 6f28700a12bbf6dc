"""What the author of a role writes against: `Worker`, its metrics, and the marks of its methods.

Everything here is free of sockets and of moving rows. The controller reads the marks to plan a call
(`controller.call`), and the ranks run the methods (`runtime.operation`).

| file | what |
|---|---|
| worker | `Worker`, where it runs (`WorkerContext`) and which call is running (`CallInfo`) |
| metric | `Mean`, `Sum`, `Max`, `Min`: how the values of many ranks become one |
| register | the marks: `@register` for methods, `@map_function` for functions of `batch.map` |
"""
