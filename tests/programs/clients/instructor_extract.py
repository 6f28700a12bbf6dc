"""instructor: extraction by its default mode, with a second try after a failed validation."""

import json
import sys

import instructor
from pydantic import BaseModel, field_validator

MODEL = sys.argv[2]


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


client = instructor.from_provider(f"openai/{MODEL}")
person = client.create(
    response_model=Person,
    messages=[{"role": "user", "content": "Ann is 31 years old."}],
    max_retries=2,
)
print(json.dumps(person.model_dump()))
