"""instructor: extraction by its default mode, with a second try after a failed validation."""

import json

import instructor
from pydantic import BaseModel, field_validator


class Person(BaseModel):
    """A person."""

    name: str
    age: int

    @field_validator("name")
    @classmethod
    def is_upper(cls, name: str) -> str:
        """The name, which must have capital letters only."""
        if name != name.upper():
            raise ValueError("write the name in capital letters")
        return name


client = instructor.from_provider("openai/gpt-5.2")
person = client.create(
    response_model=Person,
    messages=[{"role": "user", "content": "Ann is 31 years old."}],
    max_retries=2,
)
print(json.dumps(person.model_dump()))
